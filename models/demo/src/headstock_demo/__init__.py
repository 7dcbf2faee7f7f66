"""A small trained checkpoint that ships with headstock."""
