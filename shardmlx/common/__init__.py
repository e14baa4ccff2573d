"""What every part uses: user files, words for people, the process around Python."""
