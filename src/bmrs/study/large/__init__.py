"""Large networks, ResNet-50 and ViT, pruned one by one while they train, and measured as what is left."""
