"""What everything needs and no array library: trees, types, printing, files, lazy imports."""
