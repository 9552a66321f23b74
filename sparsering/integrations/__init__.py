"""Other people's models, with patterns."""
