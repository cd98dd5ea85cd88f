"""What a model will do on some devices before it is there: profiles, costs, simulator, splits."""
