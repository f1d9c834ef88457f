"""What a run writes: tags, page data, pictures, alert file."""
