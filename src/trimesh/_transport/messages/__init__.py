"""Large messages and bodies on their way out and in."""
