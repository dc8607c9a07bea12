"""The semantic cache: texts to vectors, and the nearest remembered ones within one partition."""
