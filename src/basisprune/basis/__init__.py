"""Convs as an orthonormal basis and a BasisScalingConv (Sections 3.1 and 3.2)."""
