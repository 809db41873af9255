"""Compute ops: one file per op, each with its specification in plain torch (see ARCHITECTURE.md, "Ops")."""
