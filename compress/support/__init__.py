"""What any program needs and nothing of the field."""
