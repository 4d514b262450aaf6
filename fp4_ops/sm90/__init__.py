"""The Hopper kernels (csrc/sm90): their launchers, and the operators built of them."""
