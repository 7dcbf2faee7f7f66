"""What paged attention backends share: their plans, and rows at fixed addresses."""
