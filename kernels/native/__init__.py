"""The ops in C for CPUs: built by the system's compiler, loaded by ctypes (see ARCHITECTURE.md, "Ops")."""
