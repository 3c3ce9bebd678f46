"""How a large problem is cut into small ones: chains, hierarchies, and parts that are alike."""
