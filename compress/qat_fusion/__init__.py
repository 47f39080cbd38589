"""Rewriting of quantized graphs so that training steps cost less."""
