"""What messages give away, and what is done against it."""
