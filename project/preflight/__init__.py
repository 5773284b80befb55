"""Before the first step: what cannot work is rejected, and what will be trained is printed."""
