"""Stand-ins under other libraries' names. Nothing here is in force before someone calls an `install`."""
