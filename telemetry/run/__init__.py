"""One run of a logger: what the user asks for, and the parts that do it."""
