"""From float to integers: numerics, calibrators, the quantizer, placement and insertion."""
