"""What all other parts stand on: checks of arguments, files, streams, numbers, random bits."""
