"""Training frameworks: one file for each, which translates its events and computes nothing."""
