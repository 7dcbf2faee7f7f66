"""The plugins that ship with core, behind the same entry points as all others."""
