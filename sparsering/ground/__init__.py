"""The lowest floor, on which all other parts stand: arguments, files, streams, numbers."""
