"""What each check of a run decides: each is switched off, and all scripts run without it."""
