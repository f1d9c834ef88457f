"""What a run says: sessions, windows, payloads, summaries; none of it loads torch."""
