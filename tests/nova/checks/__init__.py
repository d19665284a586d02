"""What a user and an operator ask of Nova, from the request to its end, whoever its scheduler is."""
