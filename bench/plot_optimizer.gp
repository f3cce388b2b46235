# Draws optimizer.svg from optimizer.dat in the current folder: speed of ddp_optimizer steps in percent of
# bare loops over the same memory. Called by run.sh.
set terminal svg noenhanced size 1000,440 font "Helvetica,13" background "white"
set output "optimizer.svg"
set title "ddp_fsdp.h: speed of optimizer steps in % of bare loops over the same memory" font ",15"
set style data histograms
set boxwidth 0.8
set style fill solid 0.9 border -1
set grid y lc rgb "#dddddd"
set xtics rotate by 30 right font ",11"
set bmargin 9
set yrange [0:110]
set key off
plot "optimizer.dat" using 2:xtic(1) lc rgb "#0072b2", \
     80 with lines lc rgb "#d55e00" dashtype 2, 100 with lines lc rgb "#000000"
