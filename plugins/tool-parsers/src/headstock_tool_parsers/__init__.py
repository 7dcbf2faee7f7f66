"""Tool parsers for the formats of four families."""
