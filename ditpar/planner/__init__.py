"""What a plan will cost, before any rank is started. Runs nothing."""
