"""What operators define: checked, recorded, and put into force with its consequences."""
