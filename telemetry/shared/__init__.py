"""What several parts share: texts, names of tags, the page's format, pictures, files of others."""
