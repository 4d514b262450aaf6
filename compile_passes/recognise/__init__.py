"""Proofs: what is a Mixture of Experts, and what each part of it does."""
