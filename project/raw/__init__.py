"""The raw trainer: what Lightning does for `lit`, done by hand in plain torch, one file per service."""
