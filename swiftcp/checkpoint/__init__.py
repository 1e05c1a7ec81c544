"""Weights in and out: Hugging Face folders by one name table a family, and resumable checkpoints of a run."""
