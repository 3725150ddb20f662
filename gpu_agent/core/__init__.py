"""What the agent decides: pure, no torch, no threads, no clock; time and engine steps are arguments."""
