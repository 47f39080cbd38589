"""compress: vision models made small and fast, and measured on the engine."""
