"""Several processes that train one model together: what each measured becomes one record."""
