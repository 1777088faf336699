"""What plans do to modules and optimizers on a mesh while they train."""
