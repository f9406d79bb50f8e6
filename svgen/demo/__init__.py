"""A small Wan model that is trained on scenes the project draws itself, and how it was made."""
