"""The door for clients whom nobody trusts: from each project's virtual host to the API bus, and back."""
