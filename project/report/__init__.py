"""What a run says and draws of itself."""
