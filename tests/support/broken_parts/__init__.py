"""A distribution of plugins that are each broken in one way; `cases` says in which."""
