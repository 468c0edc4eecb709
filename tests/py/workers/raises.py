"""Cannot be imported."""
raise ValueError("broken at import")
