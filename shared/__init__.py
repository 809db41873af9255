"""What all services share: messages, scripts, leases, settings. Imports no service and no torch."""
