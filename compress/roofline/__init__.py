"""Rooflines: where a network's time must go on a device, and where compression pays."""
