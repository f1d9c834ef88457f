"""What a run writes: tags, page data, pictures."""
