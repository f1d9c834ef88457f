"""Models, runs, readers and processes that the tests share."""
