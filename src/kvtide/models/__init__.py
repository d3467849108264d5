"""What a model's configuration means: its layout, its bytes a token, who can serve it. Pure."""
