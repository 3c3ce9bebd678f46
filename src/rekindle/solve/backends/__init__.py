"""MIP and CP engines behind one interface; each is imported only when it solves."""
