"""Values that a run writes: tags, page data, pictures."""
