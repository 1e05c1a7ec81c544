"""Models: `MultimodalGPTModel`, the parts it is made of, and one folder a family."""
