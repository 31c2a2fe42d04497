"""Template `gluon_hopper`: the warp-specialised kernel for Hopper, in Gluon."""
