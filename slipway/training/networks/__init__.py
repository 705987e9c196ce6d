"""Networks: built-in, from timm, pretrained, and frozen parts."""
