"""What stands between the server and the endpoints. `order` says in which order."""
